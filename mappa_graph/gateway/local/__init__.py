"""`LocalEngine`: transformers models in this process, the embedded default that needs no server.

This folder is the only part of the package that imports torch; import it by name
(`from mappa_graph.gateway.local import LocalEngine`). Policies whose first weights are the same folder share one module until a
version of their own is published. A version is published by building a second module beside the first, so nothing pauses; a call
keeps the module it began on until it ends. The one thing to know: log-probs are those of the sampling distribution at the call's
temperature, before top-k and top-p; sample with top_p = 1 and top_k = 0 what is to be trained on.
"""

from .serving import LocalEngine

__all__ = ["LocalEngine"]
