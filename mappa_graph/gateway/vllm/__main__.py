"""`python -m mappa_graph.gateway.vllm`: makes vLLM's environment."""

import sys

from .environment import main

sys.exit(main())
