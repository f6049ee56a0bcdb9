"""Whole episodes with a trained agent, what they leave behind, and their scores."""
