"""The evaluation harness: tasks, metrics, a resumable runner over sweeps, and a report.

A sweep file names a model, tasks, policies and budgets. `runner.run_sweep` turns it into cells and writes one
JSON line an example; `report` reads those lines. `engine.py` is the only file here that builds caches.
"""
