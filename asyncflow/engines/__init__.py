"""Engines: what generates and what trains. Whoever imports one has MKL keep the bits of rows, before anything is computed."""

from asyncflow.mkl import keep_bits_of_rows

keep_bits_of_rows()
