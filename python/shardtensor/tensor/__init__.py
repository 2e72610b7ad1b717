"""The tensor class, its spec, and layouts and meshes as Python sees them. Imports no other room; they add methods to the class."""
