"""What two parties of an Assay run must agree on: identities, envelopes, formats, sampling, carriers.

Imports no other part of Assay. Outside ``protocol.reference`` nothing here imports torch, transformers,
vllm or fastapi; ``boto3`` and ``libp2p`` are imported only inside their carrier module.
"""
