"""`python -m megatron_lynx`: the command line."""

from megatron_lynx.cli import main

if __name__ == "__main__":
    main()
