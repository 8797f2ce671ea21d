"""What notices that ranks disagree, died or hang, and says which."""
