"""Part of Assay: verifier."""
