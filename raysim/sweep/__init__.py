"""Sweeps: many runs from one file, in this process, as Ray jobs, or as lines to submit.

`settings` reads a sweep and makes its points, `folder` is what lies on disk, `lanes` runs points here, `jobs` submits them,
`board` shows how it goes. However a point is run, it is its file `points/NAME.yaml` that is run, by `folder.run_point`.
"""
