"""Weights of matrix products: how a checkpoint keeps them, how they are held, and the products.

A format (`method.WeightFormat`) reads a matrix of a checkpoint as parts; a method (`method.Linear`)
takes parts and multiplies by them. The rest of the engine knows these two contracts and no format.
`table` has every format and method by name, and is the only module here that others ask for one.
"""
