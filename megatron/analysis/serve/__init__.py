"""Serve a dump as web pages, which are updated while a run is still writing it.

The modules, from the files to the browser:

    records       columns of all records, which grow while index files grow
    follower      find the files of a dump, and read index files from where the last read ended
    catalog       logical tensors as columns, with the ID, place and use of each
    statistics    numbers of the tensors as columns, kept in a file for the next start
    priority      let the work in the background wait while a view is drawn
    measuring     measure tensors in a process of low priority, the visible ones first
    training      loss, gradient norm and tensor statistics that a run writes
    contents      one tensor: histograms, codes, scales, channels, tokens, pixels, attention
    address       the state of the page as the query of its URL
    charts, maps, panels/     figures as JSON for Plotly
    pages/        the parts of the page
    application   the Dash application and its callbacks
    gate          access control by token, cookie and Host header
    server        start and stop the web server

Only `application` and `pages/` import Dash. The files of a dump are never changed; measured
statistics are stored in the same cache as those of `stats`.
"""
