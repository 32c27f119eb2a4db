"""The worker: leases units, generates rollouts with the published weights, commits to them, uploads them.

Trusts only the root key it was pinned to. Imports ``protocol`` and third parties, never another part; torch is
imported only by the torch engine's modules (``torch_engine``, ``kv_cache``) and never by the daemon.
"""
