"""The sections of a run's settings, one module for each part of the product; `mappa_graph.config` puts them together."""
