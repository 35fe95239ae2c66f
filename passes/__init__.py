"""FX passes: recognise pairs of collective and matmul, choose their plans, rewrite each to one fused op.

The way of a graph, file by file: collectives.py lists its collectives; gather_site.py follows a gathered
tensor forward to its matmuls and scatter_site.py a reduce_scatter back to its matmul (way.py: what is done to
the product in between), both by the structural rules of rows.py, which replay.py takes once more on another
tensor; views.py says which dims are rows and which are columns, cuts.py and pieces.py what is cut out, padded
and put together; decide.py turns what they found into a Problem and asks the strategy; rewrite_gather.py and
rewrite_scatter.py replace the nodes; chain.py and order.py pin the order of all that communicates,
in_flight.py leaves room for collectives in flight over a fused op, and agreement.py tells the other ranks;
pass_list.py is the list of these steps over the work on one graph (work.py), and fusion_pass.py the whole as
a pass of Inductor.
"""

# From the repository's root, `import passes` would load a second copy of every class in here.
if __name__ != "flux_inductor.passes":
    raise ImportError(f"import this package as flux_inductor.passes, not as {__name__}")
