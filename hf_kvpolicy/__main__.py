"""`python -m hf_kvpolicy` is the command `kvpolicy`, for launchers that start modules."""

from .cli import main

if __name__ == "__main__":
    main()
