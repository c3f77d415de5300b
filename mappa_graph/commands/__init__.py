"""The commands, one module for each part of the product. A module's `register(app)` adds its own; `cli.py` lists the modules."""
