"""`python -m megatron_lynx.cli`: the console script, where it is not on the path."""

from megatron_lynx.cli import main

if __name__ == "__main__":
    main()
