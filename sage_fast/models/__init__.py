"""Video models. `family.py` says what the trainer needs of one; each family has a
folder.
"""
