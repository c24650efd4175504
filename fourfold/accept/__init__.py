"""The acceptance kit, `fourfold accept`: what this machine's devices do, held against what they
must do, in one report without anything private."""
