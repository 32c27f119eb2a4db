"""The coordinator: registry, leases, submissions, audit draw, ledger, event log and dashboard of a run.

A FastAPI service over one database. It hands out work and keeps the books; it is never trusted to decide silently:
every act is an entry of an append-only, hash-chained log. Imports ``protocol`` and third parties, no other part.
"""
