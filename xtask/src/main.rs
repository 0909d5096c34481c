//! The project's own checks and tasks: `cargo xtask tidy`, `header`, `surface`, `test`, `soak`.
//!
//! What a document of this project demands and a program can check is checked here.

mod header;
mod leftovers;
mod soak;
mod stages;
mod surface;
mod tidy;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Checks and chores of the poolfs workspace.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Check the crate graph, where `unsafe` stands, file sizes, first lines, the C header, the preload library's imports, and what is
    /// said of libc's functions.
    Tidy,
    /// Write include/poolfs.h from the C library's functions and their comments.
    Header,
    /// Write docs/surface.md from client/preload/surface.txt.
    Surface,
    /// Run the stages of `make test`, print the time of each, and fail after 60 minutes.
    Test {
        /// Run only the stages whose names contain this.
        #[arg(long)]
        only: Option<String>,
    },
    /// Run what takes hours, and write what it showed to docs/soak.md.
    Soak {
        /// Run only the stages whose names contain this.
        #[arg(long)]
        only: Option<String>,
    },
    /// What a stage of `soak` runs.
    #[command(subcommand, hide = true)]
    SoakPart(soak::Part),
}

fn main() -> Result<()> {
    match Arguments::parse().task {
        Task::Tidy => tidy::run(),
        Task::Header => header::write(&tidy::workspace_root()),
        Task::Surface => surface::write(&tidy::workspace_root()),
        Task::Test { only } => stages::run(only.as_deref()),
        Task::Soak { only } => soak::run(only.as_deref()),
        Task::SoakPart(part) => part.run(),
    }
}
