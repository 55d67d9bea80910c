        -- What identifies a lane, in saf.parked and saf.backoff; see saf.setaside.lane

        kind IN ('main', 'service', 'route', 'retry', 'replay', 'found_route', 'found_retry',
                 'found_replay', 'doubt', 'key', 'later', 'ahead')
        AND (subject = '' OR kind IN ('service', 'route', 'found_route', 'key', 'later', 'ahead'))
        AND (broker = 'ffffffff-ffff-ffff-ffff-ffffffffffff' OR kind IN ('route', 'found_route'))
