//! The filesystem service: one process per pool.
