"""The tensor class, its spec, and Python's layouts and meshes. Imports no other folder; others add methods to the class."""
