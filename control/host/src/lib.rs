//! What the control side asks of the host: control groups, mounts, processes, behind one trait.
