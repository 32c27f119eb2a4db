"""Part of Assay: node."""
