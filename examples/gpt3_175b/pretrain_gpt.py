"""Train a GPT by the flags of Megatron-DeepSpeed's pretrain_gpt.py."""

from fourfold.compat.megatron import main

if __name__ == "__main__":
    main()
