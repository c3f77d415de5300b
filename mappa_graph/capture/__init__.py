"""From the callback events of a LangGraph app to records: snapshots, run tree, joins, lineage, coaching."""
