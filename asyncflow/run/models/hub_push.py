"""Push of a folder to the Hugging Face Hub: `python -m asyncflow.run.models.hub_push FOLDER OWNER/NAME` prints its address.

The repository is made if there is none. Token and address are huggingface_hub's own (HF_TOKEN, HF_ENDPOINT).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from huggingface_hub import HfApi, get_session

SILENCE_SECONDS: Final = 300
"""How long a Hub may say nothing: huggingface_hub itself waits for ever."""


def main() -> int:
    """Run the module as a program. Returns the exit code: 0, or 1 when the Hub has not taken it."""
    parser = argparse.ArgumentParser(prog="python -m asyncflow.run.models.hub_push", description="Push a model to the Hub.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("repo")
    parser.add_argument("--private", action="store_true")
    arguments = parser.parse_args()
    api = HfApi(library_name="asyncflow")
    get_session().timeout = SILENCE_SECONDS
    try:
        url = api.create_repo(arguments.repo, private=arguments.private, exist_ok=True)
        api.upload_folder(repo_id=arguments.repo, folder_path=arguments.folder, commit_message="Trained with AsyncFlow")
    except Exception as error:  # of many libraries: the Hub's, its HTTP client's
        print((str(error).strip().splitlines() or [type(error).__name__])[0], file=sys.stderr)
        return 1
    print(url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
