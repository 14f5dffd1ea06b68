"""Chooses what each step computes. No torch, no clock, no thread: commands in, plans and events out.

Read: scheduler (the verbs), state (the nouns and the moves between stages), lines and seats (where requests wait and run), intake
(what commands change), then one file for each choice in the order in which a step makes them: forks, growth, admission, prefill;
plan (the choices as flat arrays, with masks, adjustments and scoring for those who want them), settle (what a result changes).
"""
