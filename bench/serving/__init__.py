"""What serving on several GPUs (or one, or CPUs) gives: prefill and decode apart against colocated, same devices, same router.

`python -m bench.serving` (`make bench-two-gpus`). Read in this order: `workload` (what is asked, when), `open_loop` (asks it),
`goodput` (what of it was good enough), `sizes` (by the machine), `fleet` (router and nodes as processes), `timed_node` (a node
that notes when things happen), then the sections: `link` and `link_sides` (bytes between two devices), `hand_over`, `landing`
and `step_price`, `loads`, `harm`, `soak`; `report` (table and plots), `__main__` (sections within a time budget).
"""
