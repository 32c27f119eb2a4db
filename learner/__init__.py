"""Part of Assay: learner."""
