"""`cgx bench allreduce`: compressed all-reduce beside Gloo's, over emulated links, in one run."""
