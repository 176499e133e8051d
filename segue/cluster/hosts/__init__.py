"""Runs on several hosts: who takes part, whether they agree, who runs where. One machine needs none of it."""
