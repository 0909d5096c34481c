//! The grammar of the `image` commands.

use crate::ceph::CephArguments;
use clap::Subcommand;
use std::path::PathBuf;

/// Commands on images.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Import an image
    Import {
        /// Its name here
        name: String,
        /// oci:DIR[:TAG], oci-archive:FILE, docker-archive:FILE, tar:FILE (plain, gzip or zstd) or dir:DIR
        source: String,
        /// Store it in this directory of a CephFS, ceph:/PATH, for other hosts as well: see `image add` [default: here]
        #[arg(long, value_name = "ceph:/PATH")]
        to: Option<PathBuf>,
        /// How its cluster is reached
        #[command(flatten)]
        ceph: CephArguments,
    },
    /// Use an image that another host has imported with --to: nothing is copied
    Add {
        /// The name that it was imported as
        name: String,
        /// The directory that it was imported to
        #[arg(long, value_name = "ceph:/PATH")]
        from: PathBuf,
        /// How its cluster is reached
        #[command(flatten)]
        ceph: CephArguments,
    },
    /// List the images
    Ls,
    /// Show everything about an image
    Inspect {
        /// The image
        name: String,
    },
    /// Remove an image, and the layers nobody else uses. One at a cluster stays there as long as another host has it
    Rm {
        /// The image
        name: String,
        /// Also when containers were made of it: they keep its layers. One at a cluster stays there, and is not asked for
        #[arg(long)]
        force: bool,
    },
}
