"""Coverage of processes that are killed: what they have left does not keep the others' from being combined."""

from __future__ import annotations

from pathlib import Path

from coverage import CoverageData

from tests.cut_off import remove_cut_off


def test_what_a_kill_has_left_is_removed_and_what_is_whole_is_not(tmp_path: Path) -> None:
    whole = CoverageData(str(tmp_path / ".coverage.whole"))
    whole.add_lines({f"/file/{number}.py": range(number) for number in range(2000)})
    whole.write()
    whole.close(force=True)
    content = (tmp_path / ".coverage.whole").read_bytes()
    for name, left in (
        ("empty", b""),
        ("half", content[: len(content) // 2]),
        ("hole", content[:8192] + bytes(len(content) - 8192)),
    ):
        (tmp_path / f".coverage.{name}").write_bytes(left)
    (tmp_path / ".coverage").write_bytes(b"what was combined before")
    assert {path.name for path in remove_cut_off(tmp_path)} == {".coverage.empty", ".coverage.half", ".coverage.hole"}
    assert {path.name for path in tmp_path.iterdir()} == {".coverage", ".coverage.whole"}
