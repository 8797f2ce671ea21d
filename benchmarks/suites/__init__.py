"""Timed suites, a file each: `SUITES`, whose cells `benchmarks.session` runs, saves and
resumes one by one.
"""
