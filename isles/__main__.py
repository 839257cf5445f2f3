"""`python -m isles` is the command `isles`; so is `torchrun ... -m isles`."""

from isles.cli import main

if __name__ == "__main__":
    main()
