"""Part of Assay: coordinator."""
