"""Trains the head of the rule `judge`: labels from a target's own answers, and a logistic regression on them."""
