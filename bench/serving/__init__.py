"""What serving on several GPUs (or one, or CPUs) gives: prefill and decode apart against colocated, same devices, same router.

`python -m bench.serving` (`make bench-two-gpus`). Read in this order: `workload` (what is asked, when), `open_loop` (asks it),
`goodput` (what of it was good enough), `fleet` (router and nodes as processes), then the sections: `link` (bytes between two
devices), `hand_over`, `landing`, `loads`, `harm`; `report` (table and plots), `__main__` (sections within a time budget).
"""
