"""Agents in processes of their own, under random requests and all the trouble that can come to them."""
