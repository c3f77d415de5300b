"""What runs on the far side of the wall: a fork server, the wall it builds around each kernel, and the kernel itself.

This folder is bound into the sandbox by itself and runs there without the rest of the package, so its modules import nothing but
the standard library, `ipykernel` and each other.
"""
