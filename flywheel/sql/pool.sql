-- The pool: compiled tasks, their files, and what validation said of them.

-- name: insert_task
-- A task whose content the pool knows changes nothing, unless it had been put aside: then it gets
-- another try, on the newer word.
INSERT INTO flywheel.pool_tasks AS known
    (tenant_id, id, domain, domain_digest, origin, source_run, source_by, split, task, expectation,
     content_digest, status, reason, cycle_id)
VALUES
    (%(tenant_id)s, %(id)s, %(domain)s, %(domain_digest)s, %(origin)s, %(source_run)s,
     %(source_by)s, %(split)s, %(task)s, %(expectation)s, %(content_digest)s, %(status)s,
     %(reason)s, %(cycle_id)s)
ON CONFLICT (tenant_id, domain, content_digest) DO UPDATE
SET domain_digest = excluded.domain_digest, source_run = excluded.source_run,
    source_by = excluded.source_by, status = excluded.status, reason = NULL, cycle_id = NULL
WHERE known.status IN ('quarantined', 'retired') AND excluded.status = 'pending'
RETURNING id;

-- name: insert_file
INSERT INTO flywheel.pool_files (tenant_id, task_id, path, content)
VALUES (%(tenant_id)s, %(task_id)s, %(path)s, %(content)s)
ON CONFLICT (tenant_id, task_id, path) DO NOTHING;

-- name: get_tasks
SELECT tenant_id, id, domain, domain_digest, origin, source_run, source_by, split, task,
       expectation, content_digest, snapshot, status, reason, demonstration, cycle_id, fixed_by,
       created_at
FROM flywheel.pool_tasks
WHERE tenant_id = %(tenant_id)s AND id = ANY(%(ids)s)
ORDER BY created_at DESC, id DESC;

-- name: list_tasks
-- Newest first.
SELECT tenant_id, id, domain, domain_digest, origin, source_run, source_by, split, task,
       expectation, content_digest, snapshot, status, reason, demonstration, cycle_id, fixed_by,
       created_at
FROM flywheel.pool_tasks
WHERE tenant_id = %(tenant_id)s
  AND (%(domain)s::text IS NULL OR domain = %(domain)s)
  AND (%(status)s::text IS NULL OR status = %(status)s)
  AND (%(split)s::text IS NULL OR split = %(split)s)
  AND (%(before_at)s::timestamptz IS NULL OR (created_at, id) < (%(before_at)s, %(before_id)s))
ORDER BY created_at DESC, id DESC
LIMIT %(limit)s;

-- name: get_of_inputs
-- What counts or will, of these inputs.
SELECT tenant_id, id, domain, domain_digest, origin, source_run, source_by, split, task,
       expectation, content_digest, snapshot, status, reason, demonstration, cycle_id, fixed_by,
       created_at
FROM flywheel.pool_tasks
WHERE tenant_id = %(tenant_id)s AND domain = %(domain)s AND status IN ('pending', 'admitted')
  AND task->'input' = ANY(%(inputs)s::jsonb[])
ORDER BY created_at DESC, id DESC;

-- name: get_files
SELECT task_id, path, content FROM flywheel.pool_files
WHERE tenant_id = %(tenant_id)s AND task_id = ANY(%(ids)s)
ORDER BY task_id, path;

-- name: count_by_status
SELECT status, count(*) AS tasks FROM flywheel.pool_tasks
WHERE tenant_id = %(tenant_id)s AND (%(domain)s::text IS NULL OR domain = %(domain)s)
GROUP BY status;

-- name: admit
UPDATE flywheel.pool_tasks
SET status = 'admitted', reason = NULL, snapshot = %(snapshot)s,
    demonstration = %(demonstration)s, cycle_id = %(cycle_id)s
WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND status = 'pending';

-- name: quarantine
UPDATE flywheel.pool_tasks
SET status = 'quarantined', reason = %(reason)s, demonstration = NULL, cycle_id = %(cycle_id)s
WHERE tenant_id = %(tenant_id)s AND id = %(id)s AND status IN ('pending', 'admitted');

-- name: quarantine_of_run
UPDATE flywheel.pool_tasks
SET status = 'quarantined', reason = %(reason)s, demonstration = NULL, cycle_id = %(cycle_id)s
WHERE tenant_id = %(tenant_id)s AND source_run = %(source_run)s
  AND status IN ('pending', 'admitted');

-- name: supersede
UPDATE flywheel.pool_tasks
SET status = 'retired', reason = 'a later correction of the same run replaced it'
WHERE tenant_id = %(tenant_id)s AND source_run = %(source_run)s
  AND content_digest <> %(content_digest)s AND status IN ('pending', 'admitted');

-- name: reopen
-- A task was validated under one version of its domain: under another it is validated anew. What
-- people contradicted each other about no version can mend.
UPDATE flywheel.pool_tasks
SET status = 'pending', reason = NULL, domain_digest = %(domain_digest)s
WHERE tenant_id = %(tenant_id)s AND domain = %(domain)s AND domain_digest <> %(domain_digest)s
  AND (status IN ('pending', 'admitted')
       OR (status = 'quarantined' AND NOT starts_with(reason, %(contradicted)s)));

-- name: mark_fixed
UPDATE flywheel.pool_tasks SET fixed_by = %(adapter)s
WHERE tenant_id = %(tenant_id)s AND id = ANY(%(ids)s) AND fixed_by IS NULL;
