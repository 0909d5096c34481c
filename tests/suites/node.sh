# about: node: fs by callbacks, promises, streams and workers; recursive copies and removals, watches, a package installed by npm from a directory
# packages: nodejs
# version: node --version
# limit: 200
cat >all.js <<'X'
const fs = require('fs'), fsp = fs.promises, path = require('path'), crypto = require('crypto');
const { pipeline } = require('stream/promises'), zlib = require('zlib'), assert = require('assert');
const { Worker } = require('worker_threads'), { execFileSync, spawn } = require('child_process');
const w = process.env.W, at = (...p) => path.join(w, ...p);
const hash = f => crypto.createHash('md5').update(fs.readFileSync(f)).digest('hex');
(async () => {
  await fsp.mkdir(at('t/a/b/c'), { recursive: true });
  await Promise.all(Array.from({ length: 500 }, (_, n) => fsp.writeFile(at('t/a', `f${n}`), `file ${n}\n`.repeat(n))));
  console.log('files', (await fsp.readdir(at('t/a'))).length, hash(at('t/a/f499')));
  const sizes = await Promise.all(Array.from({ length: 500 }, async (_, n) => (await fsp.stat(at('t/a', `f${n}`))).size));
  console.log('bytes', sizes.reduce((a, b) => a + b));
  fs.cpSync(at('t'), at('u'), { recursive: true });
  console.log('copied', fs.readdirSync(at('u'), { recursive: true }).length);
  fs.renameSync(at('u/a'), at('u/z')); fs.symlinkSync('z/f3', at('u/link')); fs.linkSync(at('u/z/f4'), at('u/hard'));
  console.log('links', fs.readFileSync(at('u/link'), 'utf8').length, fs.statSync(at('u/hard')).nlink, fs.realpathSync(at('u/link')).replace(w, '$W'));
  const big = fs.openSync(at('big'), 'w+'), block = Buffer.alloc(65536);
  for (let n = 0; n < 400; n++) { block.fill(n % 251); fs.writeSync(big, block, 0, block.length, n * block.length); }
  fs.ftruncateSync(big, 400 * 65536 - 17); fs.fsyncSync(big); console.log('big', fs.fstatSync(big).size, hash(at('big')));
  await pipeline(fs.createReadStream(at('big')), zlib.createGzip(), fs.createWriteStream(at('big.gz')));
  await pipeline(fs.createReadStream(at('big.gz')), zlib.createGunzip(), fs.createWriteStream(at('big.again')));
  console.log('streams', hash(at('big.again')));
  const handle = await fsp.open(at('append'), 'a+');
  await Promise.all(Array.from({ length: 200 }, (_, n) => handle.appendFile(`${n % 10}\n`))); await handle.close();
  console.log('appended', fs.statSync(at('append')).size);
  const ends = await Promise.all([0, 1, 2, 3].map(n => new Promise((done, fail) => {
    const worker = new Worker(`const fs=require('fs'),{workerData:d}=require('worker_threads');
      for(let i=0;i<300;i++){fs.writeFileSync(d.p+i,'w'+i);if(fs.readFileSync(d.p+i,'utf8')!=='w'+i)throw 1;if(i%2)fs.unlinkSync(d.p+i)}`, { eval: true, workerData: { p: at(`w${n}-`) } });
    worker.on('error', fail); worker.on('exit', done); })));
  console.log('workers', ends.join(), fs.readdirSync(w).filter(f => /^w\d-/.test(f)).length);
  const seen = new Promise(done => { const watch = fs.watch(at('t'), (kind, name) => { if (name === 'appears') { watch.close(); done(name); } }); });
  fs.writeFileSync(at('t/appears'), 'x'); console.log('watched', await seen);
  for (const [name, f] of Object.entries({ missing: () => fs.readFileSync(at('none')), notdir: () => fs.readdirSync(at('big')), full: () => fs.rmdirSync(at('t')),
    exists: () => fs.mkdirSync(at('t')), exclusive: () => fs.openSync(at('big'), 'wx'), loop: () => { fs.symlinkSync('loop', at('loop')); fs.readFileSync(at('loop')); } }))
    try { f(); console.log(name, 'worked'); } catch (error) { console.log(name, error.code); }
  fs.utimesSync(at('big'), 1000000000, 1000000001.5); console.log('times', fs.statSync(at('big')).mtimeMs);
  fs.chmodSync(at('big'), 0o640); fs.accessSync(at('big'), fs.constants.R_OK); console.log('mode', (fs.statSync(at('big')).mode & 0o777).toString(8));
  console.log('child', execFileSync(process.execPath, ['-e', 'process.stdout.write(require("fs").readFileSync(0))'], { stdio: [fs.openSync(at('t/a/f2'), 'r'), 'pipe', 'inherit'] }).toString().trim());
  await fsp.rm(at('u'), { recursive: true }); console.log('removed', fs.existsSync(at('u')));
})().catch(error => { console.error(error); process.exit(1); });
X
node all.js
mkdir -p pkg/lib app
echo '{"name":"small","version":"1.2.3","main":"lib/index.js","bin":{"small":"lib/index.js"}}' >pkg/package.json
printf '#!/usr/bin/env node\nmodule.exports = () => "answer 42"; if (require.main === module) console.log(module.exports());\n' >pkg/lib/index.js
echo '{"name":"app","version":"1.0.0"}' >app/package.json
if command -v npm >/dev/null; then
    export HOME=$W npm_config_update_notifier=false npm_config_audit=false npm_config_fund=false
    (cd pkg && npm pack --silent)
    cd app && npm install --silent --offline ../pkg/small-1.2.3.tgz >&2
    node -e 'console.log(require("small")())'
    node_modules/.bin/small
    ls -A node_modules
fi
echo "21 kinds of use"
