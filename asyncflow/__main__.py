"""`python -m asyncflow`, which is how `torchrun -m asyncflow` starts it."""

from asyncflow.cli import main

if __name__ == "__main__":
    main()
