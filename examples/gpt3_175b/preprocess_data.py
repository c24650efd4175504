"""JSON lines to token files, by the flags of Megatron's tools/preprocess_data.py."""

from fourfold.compat.megatron_preprocess import main

if __name__ == "__main__":
    main()
