"""Results that go into a paper: `raysim report` compares finished runs and says how much the comparison is worth.

Run folders become runs (`collect`), runs become a study of methods, conditions and seeds (`study`), the study becomes numbers
(`measures`, `statistics`), and numbers become pictures (`figures`) and pages (`document`, `pages`).
"""

from __future__ import annotations

MEASURES = {
    "last": "last round",
    "last_five": "mean of the last five tested rounds",
    "at_best_validation": "test accuracy at the best validation round",
}
"""What methods can be compared by, and what it is called; named here so that `--help` loads nothing heavy.

The best round on the test set is reported but nothing is compared by it: it was chosen by the data that it is judged on.
"""
