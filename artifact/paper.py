"""The paper's own numbers (arXiv 2509.16447 v1, tables 1 and 2; v2 where it says so), printed beside ours."""

from __future__ import annotations

# K_max as printed, by experiment and M (trained on 1..M objects). v2 gives 7 for grid-all on 1-3 objects.
K_MAX = {
    "grid-all": {1: "1", 2: "5", 3: "9 (v2: 7)", 4: "10", 5: "10", 6: "11"},
    "grid-single": {1: "1", 2: "1+(0-1)", 3: "1+(0-2)", 4: "1+(0-3)", 5: "1+(0-4)", 6: "1+(0-5)"},
    "grid-single-local": {1: "6", 3: "9+(0-2)", 5: "10+(0-2)"},
    "color": {1: "1", 3: "4", 5: "7"},
    "grid-random": {2: "3", 3: "5", 4: "6", 5: "8", 6: "9"},
    "grid-drop-one": {3: "3+(0-1)", 4: "8+(0-1)", 5: "9+(0-1)", 6: "10+(0-1)"},
    "list-all": {3: "fails beyond 3 (v2)"},
    "list-all-local": {3: "restored (v2)"},
}

# Number of objects drawn for K = 0 (table 2, bottom).
DRAWN_AT_0 = {
    "grid-all": {1: "0-1", 2: "0", 3: "0", 4: "0", 5: "0", 6: "0"},
    "grid-single": {2: "0-2", 3: "0-3", 4: "1-4", 5: "0-5", 6: "1-6"},
    "grid-random": {2: "0-1", 3: "0-3", 4: "0-4", 5: "0-4", 6: "0-4"},
    "grid-drop-one": {3: "0-1", 4: "0-1", 5: "0-1", 6: "0-1"},
}
