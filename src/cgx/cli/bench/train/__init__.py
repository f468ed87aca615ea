"""`cgx bench train`: training steps with compressed gradients beside stock DDP's, over emulated links, in one run."""
