//! The command `demo`: two containers of one image at work in one pool, and what that took.

mod containers;
mod report;

use crate::arguments::DemoArguments;
use crate::container;
use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::images::Bar;
use crate::pool::{self, NewPool};
use crate::record::PoolRecord;
use crate::signals::Signals;
use crate::text::{print, size};
use crate::{outlived, service};
use containers::Worker;
use poolfs_host::remove_tree;
use poolfs_image::{ImageConfig, ImageRecord, Limits, write_layout};
use report::{Part, Report};
use std::path::Path;
use std::time::{Duration, Instant};

const IMAGE: &str = "debian";
const CONTAINERS: [&str; 2] = ["one", "two"];
const POOL_MEMORY: u64 = 2 << 30;
const POOL_CACHE: u64 = 512 << 20;
const STOP_WAIT: Duration = Duration::from_secs(2);

/// Show it; 1 when a step failed.
pub fn demo(context: &Context, arguments: &DemoArguments) -> Result<u8> {
    let work = std::path::absolute(&arguments.work).map_err(|error| Failure::file(&arguments.work, error))?;
    std::fs::create_dir_all(&work).map_err(|error| Failure::file(&work, error))?;
    let mut signals = Signals::catch()?;
    // State of its own, so that nothing of the user's is touched.
    let own = context.with_state(work.join("state"));
    let layout = work.join("oci");
    // What an earlier demonstration left that was killed.
    clean_up(&own, &layout)?;
    let legacy = arguments.legacy || own.preload_library().is_err();
    if legacy && !arguments.legacy {
        print("the preload library is not beside poolfs: everything goes by FUSE\n")?;
    }
    let result =
        prepare(&own, &arguments.root_image, &layout).and_then(|image| show(&own, &image, legacy, &mut signals));
    let cleaned = clean_up(&own, &layout);
    result.and_then(|status| cleaned.map(|()| status))
}

fn prepare(context: &Context, root_image: &Path, layout: &Path) -> Result<ImageRecord> {
    let since = Instant::now();
    let mut bar = Bar::cancelled_by(Signals::catch()?);
    let source = if root_image.is_dir() {
        format!("dir:{}", root_image.display())
    } else {
        let config = ImageConfig { cmd: vec!["/bin/sh".to_owned()], ..ImageConfig::default() };
        write_layout(root_image, layout, IMAGE, &config, &mut bar)?;
        format!("oci:{}:{IMAGE}", layout.display())
    };
    say(&format!("poolfs image import {IMAGE} {source}"))?;
    let image = context.images()?.import(IMAGE, &source, &Limits::default(), &mut bar)?;
    print(&format!("  {} unpacked and verified in {:.1} s\n", size(image.bytes()), since.elapsed().as_secs_f64()))?;
    Ok(image)
}

fn show(context: &Context, image: &ImageRecord, legacy: bool, signals: &mut Signals) -> Result<u8> {
    let pool = format!("demo-{}", std::process::id());
    say(&format!("poolfs pool create {pool} --memory {} --cache {}", size(POOL_MEMORY), size(POOL_CACHE)))?;
    let new =
        NewPool { name: pool.clone(), cpus: None, memory_bytes: POOL_MEMORY, cache_bytes: POOL_CACHE, owner: None };
    pool::create(context, new)?;
    let how = if legacy { " --fuse" } else { "" };
    for name in CONTAINERS {
        say(&format!("poolfs run {pool} {IMAGE} --name {name}{how} -i -- /bin/sh -c '...'"))?;
    }
    let mut workers = containers::start(context, &pool, &image.name, &CONTAINERS, legacy)?;
    let report = containers::follow(&mut workers, || signals.end_was_asked())
        .and_then(|()| collect(context, image, &pool, legacy, &mut workers));
    if report.is_err() {
        stop_all(context);
    }
    workers.iter_mut().for_each(Worker::end);
    let report = report?;
    print(&report.text())?;
    Ok(u8::from(!report.passed()))
}

/// Ask the service while the containers are there, let them end, then look at what they wrote.
fn collect(context: &Context, image: &ImageRecord, pool: &str, legacy: bool, workers: &mut [Worker]) -> Result<Report> {
    let service = service::status(context, pool)?;
    let memory_bytes = context.groups()?.memory_used(&*context.host, pool);
    workers.iter_mut().for_each(Worker::end);
    let all = context.containers()?;
    let mut parts = Vec::new();
    for worker in workers {
        let directory = all.path(&worker.name);
        let instance = service.instances.iter().find(|instance| instance.mount_point.starts_with(&directory)).cloned();
        let upper = report::look_at_upper(&container::upper_of(&directory))?;
        parts.push(Part { name: worker.name.clone(), steps: std::mem::take(&mut worker.steps), instance, upper });
    }
    Ok(Report { image_bytes: image.bytes(), layers: image.layers.len(), service, memory_bytes, legacy, parts })
}

fn stop_all(context: &Context) {
    for name in CONTAINERS {
        // A container that was never made has nothing to stop.
        let _ = container::stop(context, name, STOP_WAIT);
    }
}

/// Remove everything a demonstration makes, whatever there is of it.
fn clean_up(context: &Context, layout: &Path) -> Result<()> {
    let mut result = Ok(());
    context.begin_anew();
    for name in context.containers()?.names()? {
        let stopped = container::stop(context, &name, STOP_WAIT);
        result = result.and(stopped).and(container::remove(context, &name, true));
    }
    let pools = context.pools()?;
    for name in pools.names()? {
        if let Some(mut pool) = pools.try_lock::<PoolRecord>(&name)? {
            let ended = service::end(context, &mut pool);
            result = result.and(ended).and(outlived::remove_pool(context, pool));
        }
    }
    result?;
    for gone in [context.state.clone(), layout.to_path_buf()] {
        remove_tree(&gone)?;
    }
    Ok(())
}

fn say(command: &str) -> Result<()> {
    print(&format!("$ {command}\n"))
}
