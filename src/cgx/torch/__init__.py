"""The PyTorch side: sessions and the doors that lead to them."""
