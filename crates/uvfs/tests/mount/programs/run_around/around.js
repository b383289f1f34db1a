// The same in JavaScript: synchronous calls are the C library's, asynchronous ones those of libuv's threads, or of its
// ring (UV_USE_IO_URING). Arguments: UV_USE_IO_URING's value, a place, an operation, a directory.
const fs = require('fs'), { spawnSync, spawn } = require('child_process'), { promisify } = require('util');
const [, , , , operation, where] = process.argv;
process.chdir(where);
const say = (what, result) => fs.writeSync(1, `${what}: ${result}\n`);
const step = (what, call) => { try { say(what, call()); } catch (e) { say(what, e.code); } };
const around = async (name, ...args) => {
  try { const done = await promisify(fs[name])(...args); say('around ' + name, typeof done === 'object' ? done.bytesRead ?? done.bytesWritten : done); return done; }
  catch (e) { say('around ' + name, e.code); }
};
const text = Buffer.alloc(8);
function use(name, fd) {
  say('--', name + ' ' + fd);
  step('write', () => fs.writeSync(fd, '<used>'));
  step('read', () => fs.readSync(fd, text, 0, 5, null) + text.toString('latin1'));
  step('pread', () => fs.readSync(fd, text, 0, 8, 3) + text.toString('latin1'));
  step('pwrite', () => fs.writeSync(fd, '+', 30));
  step('fstat', () => fs.fstatSync(fd).size);
  step('same', () => ['A', 'B', 'C'].filter(f => fs.existsSync(f) && fs.statSync(f).ino === fs.fstatSync(fd).ino).join());
}
(async () => {
  // What node opens late has its number by now.
  await promisify(fs.stat)('.');
  let a = fs.openSync('A', 'w+'), b = fs.openSync('B', 'w+');
  for (let i = 0; i < 40; i++) { fs.writeSync(a, String(i).padStart(100, '0')); if (i < 12) fs.writeSync(b, String(i).padStart(10, '0')); }
  fs.readSync(a, text, 0, 5, 350);
  const buffer = Buffer.alloc(11);
  switch (operation) {
    case 'close': await around('close', a); break;
    case 'reopen': await around('close', a); say('same number', await promisify(fs.open)('B', 'r+') === a); break;
    case 'open': { const fd = await around('open', 'A', 'r+'); use('again', fd); break; }
    case 'read': await around('read', a, buffer, 0, 11, 20); use('A', a); await around('read', a, buffer, 0, 11, null); break;
    case 'write': await around('write', a, Buffer.from('around!'), 0, 7, null); use('A', a); await around('write', a, Buffer.from('again'), 0, 5, null);
      await around('ftruncate', b, 50); await around('fsync', a); break;
    case 'mmap': await around('copyFile', 'A', 'C'); await around('fdatasync', b); break;
    case 'fork': say('child', spawnSync('sh', ['-c', 'echo child; echo child >&3; head -c 5 <&4'], { stdio: ['ignore', 'pipe', 'inherit', a, b] }).stdout); break;
    case 'exec': await new Promise(done => spawn(process.execPath, ['-e', "const fs=require('fs');fs.writeSync(3,'node');fs.write(4,'ring',()=>0)"],
      { stdio: ['ignore', 'ignore', 'inherit', a, b] }).on('close', code => { say('child', code); done(); })); break;
  }
  use('A', a); use('B', b);
  const c = fs.openSync('C', 'w+'); use('C', c);
  await around('write', c, Buffer.from('more'), 0, 4, null);
  step('close', () => fs.closeSync(b)); use('B', b);
  for (const f of ['A', 'B', 'C']) say(f, fs.readFileSync(f).toString('base64'));
  say('to', 'its end to its end');
})();
