"""The learner: takes verified rollouts, corrects for staleness, trains, publishes the next checkpoint.

Pure parts (``advantages``, ``losses``, ``batch``) are functions over numbers; ``trainer`` holds the weights and the
optimiser; ``run`` is the loop around them. Imports ``protocol`` and third parties, never ``node``, ``verifier`` or
``coordinator``.
"""
